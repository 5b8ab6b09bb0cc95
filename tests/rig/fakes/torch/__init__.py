"""As much of torch as ranks touch outside of vLLM."""

from types import SimpleNamespace

import numpy

int16, int32 = "int16", "int32"
cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)


def get_rng_state():
    return SimpleNamespace(tolist=lambda: [0])


class Tensor:
    """A text's characters, one a float32."""

    dtype = "float32"

    def __init__(self, text):
        self.text = text

    def same(self, *_):
        return self

    detach = cpu = to = reshape = view = same

    def split(self, _):
        return [self]

    def element_size(self):
        return 4

    def numel(self):
        return len(self.text)

    def numpy(self):
        return numpy.array([ord(char) for char in self.text], dtype=numpy.int32)
