"""Fingerprints: equal for one cause, different for two."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import ErrorInfo, Frame
from harness.fingerprint import LENGTH, fingerprint, fingerprints, normalised, pattern
from harness.records import CheckRecord
from harness.status import Status

VENV = "/opt/venv/lib/python3.11/site-packages/torch/lib/libnvshmem_host.so.3: version `NVSHMEM' not found"
HOME = VENV.replace("/opt/venv/lib/python3.11", "/home/me/.cache/environments/ab12/lib/python3.12")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 0x7fff12 of 12.5 in 0123456789abcdef", "at 0x1 of  9 in fedcba9876543210"),
        ("shape '[96, -1, 64]' is invalid for input of size 39936", "shape '[8, 64]' is invalid for input of size 1"),
        ("0.00 of 1.00 GiB KV cache came back", "-0.00 of 1.00 GiB KV cache came back"),
        ("into parameter (torch.Size([0]))", "into parameter (torch.Size([256, 256]))"),
        (VENV, HOME),
        ("ids (1, 2, 3) and [4]", "ids (5,) and [6, 7, ...]"),
        ("GPU-5b6f1c1e-9f43-4c55-8a8e-0c7d3e1f2a4b is busy", "GPU-00000000-9F43-4c55-8a8e-0c7d3e1f2a4b is busy"),
        ("took 1.5e-05 s at 2026-11-30 20:54:37", "took 3 s at 2027-01-02 01:02:03"),
        ("model.layers.0.self_attn of 12GiB", "model.layers.11.self_attn of 3GiB"),
    ],
)
def test_what_varies_is_forgotten(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("shape is wrong", "size is wrong"),
        ("Qwen2VLForConditionalGeneration is unknown", "Qwen3VLForConditionalGeneration is unknown"),
        ("float16 is not supported", "bfloat16 is not supported"),
        ("a decade of facade", "a facade of decade"),  # words of hexadecimal letters are words
        ("/opt/a/one.so is missing", "/opt/a/two.so is missing"),
    ],
)
def test_names_are_not(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def frames(*some: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(where=where, file=f"{name}.py", line=n, function=name) for n, (where, name) in enumerate(some))  # type: ignore[arg-type]


def raised(message: str, kind: str = "RuntimeError", reason: str | None = None, **more: object) -> CheckRecord:
    error = ErrorInfo(type=kind, message=message, reason=reason, **more)  # type: ignore[arg-type]
    return CheckRecord(id="a", status=Status.FAIL, reason=reason, error=error)


def test_an_exception_is_its_type_its_message_and_the_package_that_raised_it() -> None:
    way = frames(("suite", "test_x"), ("rig", "engine"), ("site", "vllm/llm"), ("site", "torch/nn"), ("python", "json"))
    check = raised("boom 3", kind="vllm.errors.EngineError", frames=way)
    assert fingerprint(check) == "EngineError: boom # @ torch/nn.py:torch/nn"
    assert fingerprint(raised("boom 3", frames=frames(("suite", "test_x"), ("python", "json")))).endswith(
        "@ json.py:json"
    )


def test_lines_and_what_is_ours_are_no_part_of_it() -> None:
    one = raised("0.00 GiB", "OracleError", "not-freed", frames=frames(("suite", "test_x"), ("rig", "memory")))
    other = raised("-0.02 GiB", "OracleError", "not-freed", frames=frames(("suite", "test_y"), ("suite", "helper")))
    assert fingerprint(one) == fingerprint(other) == "OracleError not-freed: # GiB"


def test_what_a_rank_raised_has_the_cause_that_it_has_elsewhere() -> None:
    assert fingerprint(raised("rank 3: boom")) == fingerprint(raised("boom"))


def test_a_reason_without_an_error_is_the_fingerprint() -> None:
    check = CheckRecord(id="a", status=Status.TIMEOUT, reason="hang: no event for 31 s; in barrier 3 for 40 s")
    assert fingerprint(check) == "hang: no event for # s; in barrier # for # s"
    assert fingerprint(CheckRecord(id="a", status=Status.PASS)) == ""


def test_what_was_not_reached_has_the_cause_of_what_kept_it_from_it() -> None:
    crashed = CheckRecord(id="a", status=Status.CRASH, reason="signal: SIGSEGV")
    fault = raised("an illegal access at 0x10", reason="device-fault")
    late = [CheckRecord(id=c.id, status=c.status, reason=f"not-reached: {c.reason}") for c in (crashed, fault)]
    assert fingerprints([crashed, late[0]]) == ("signal: SIGSEGV",) * 2
    assert fingerprints([fault, late[1]]) == ("RuntimeError device-fault: an illegal access at #",) * 2
    assert fingerprints([late[1]]) == ("device-fault",)


@given(st.text(max_size=600))
def test_normalising_ends(text: str) -> None:
    assert len(normalised(text)) <= LENGTH


TEXTS = st.lists(
    st.sampled_from(["shape", " ", "  ", "\n", "[1, 2]", "(3,)", "0x1f", "-1.5", "/a/b/c.so", "a.b*", "(", "]", "'"])
    | st.text(max_size=6),
    max_size=40,
).map("".join)


@given(TEXTS)
def test_a_pattern_finds_its_message(message: str) -> None:
    assert re.search(pattern(message), message)


def test_a_pattern_finds_what_is_equal_but_for_numbers_and_nothing_else() -> None:
    found = pattern("shape '[96, -1, 64]' is invalid for input of size 39936")
    assert found == r"shape '\[.+\]' is invalid for input of size .+"
    assert re.search(found, "shape '[8, 1]' is invalid for input of size 2")
    assert not re.search(found, "size '[8, 1]' is invalid for input of size 2")
    assert re.search(pattern(VENV), HOME)
    assert len(pattern("a (b) " * 100)) < 300
