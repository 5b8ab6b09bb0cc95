"""A weight file of the fakes is a text, its one tensor is that text."""

from pathlib import Path


class Text(str):
    __slots__ = ()

    def to(self, dtype):
        import torch

        return torch.Tensor(self)


class safe_open:
    def __init__(self, path, framework):
        self.text = Path(path).read_text()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def keys(self):
        return ["weight"]

    def get_tensor(self, name):
        return Text(self.text)
