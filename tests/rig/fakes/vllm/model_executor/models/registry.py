def raise_for_unsupported():
    raise ValueError("Model architectures ['TinyVL'] are not supported for now.")
