"""Nothing in it: ``set_current_vllm_config`` is of later releases."""
