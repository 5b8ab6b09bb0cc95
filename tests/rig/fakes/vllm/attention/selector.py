import os

import vllm


class TinyBackend:
    pass


def get_attn_backend(head_size, dtype, kv_cache_dtype, block_size, is_attention_free=False):
    assert block_size == 16
    if os.environ.get("VLLM_USE_V1") == "0" and "v1-only" in vllm.BUGS:
        raise ValueError("CPU backend only supports V1.")
    return TinyBackend
