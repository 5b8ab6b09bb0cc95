"""A GPU whose memory is what the scripted engine says it uses."""

import sys
from types import SimpleNamespace


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(number):
    return number


def nvmlDeviceGetMemoryInfo(handle):
    worker = sys.modules["vllm.worker"]
    return SimpleNamespace(used=(1 << 28) + sum(worker.DEVICE.values()))
