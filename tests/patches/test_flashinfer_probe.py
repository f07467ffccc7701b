"""flashinfer_probe against vLLM's real question, with stand-ins for FlashInfer in several states."""

import pytest

CASES = {
    "broken dependency": ("ImportError: cannot import name", "OSError: libnvrtc.so.12"),
    "too old": ("flashinfer.decode", "trtllm_batch_decode_sparse_mla_dsv4"),
    "not callable": ("flashinfer.decode.trtllm_batch_decode_sparse_mla_dsv4 is not callable",),
    "absent": ("not installed", "nvcc"),
}


@pytest.fixture
def answers(answer):
    return answer("flashinfer_probe")


@pytest.mark.parametrize("case", CASES)
def test_stock_says_no_and_nothing_else(answers, case):
    assert answers["stock"][case] == {"answers": [False, False], "said": []}


@pytest.mark.parametrize("case", CASES)
def test_wrapped_says_no_and_why_once(answers, case):
    assert answers["wrapped"][case]["answers"] == [False, False]
    (message,) = answers["wrapped"][case]["said"]
    for part in CASES[case]:
        assert part in message


def test_a_whole_flashinfer_is_not_talked_about(answers):
    assert answers["wrapped"]["whole"] == answers["stock"]["whole"] == {"answers": [True, True], "said": []}
