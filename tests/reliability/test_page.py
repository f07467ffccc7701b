"""docs/reliability.md shows the measurements that are there, and says of the others that they were not run."""

import json

import pytest

from tests.reliability import page


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text()
    assert page.page(text) == text, "python -m tests.reliability.page"


def test_without_measurements_it_says_so(tmp_path):
    assert page.figures(tmp_path).split("\n\n") == [*list(page.NOT_RUN.values())[:-1], page.NOT_RUN["ranks"] + "\n"]


PROVENANCE = {"gpu": "NVIDIA X", "commit": "abc1234", "date": "2026-01-01", "versions": {"vllm": "0.33.0"}}
SIDE = {
    "seconds": 240.0, "requests_a_second": 30.0, "requests": {"answered": 7000, "lost": 2}, "compared_tokens": 9,
    "beyond_tolerance": 1, "parted_answers": 1234, "compared_answers": 7000, "largest_difference": 0.01,
    "alone_again": 0.0, "memory_growth_mib": {"gpu": 0.0, "host": 1.5},
}  # fmt: skip


def kept(directory, name, document):
    (directory / f"{name}-nvidia-x.json").write_text(json.dumps({**PROVENANCE, **document}))
    return page.figures(directory)


@pytest.mark.parametrize("name", ["load", "load-tp4"])
def test_failures_of_the_load_are_shown(tmp_path, name):
    text = kept(tmp_path, name, {"tp": 1, "clients": 64, "ours": SIDE, "stock": SIDE, "problems": ["lost: prompt 3"]})
    assert "commit abc1234, 2026-01-01, vLLM 0.33.0" in text
    assert "| lost | 2 | 2 |" in text and "- lost: prompt 3" in text and "Nothing else was wrong" not in text
    assert text.count("measurements/") == 1, "one file is not shown as the other"


def test_ranks(tmp_path):
    good = {"name": "tp2", "against": "tp1", "problems": [], "largest_by_prompt": [0.011], "generated_tokens": 144,
            "stock_largest_by_prompt": [0.012], "largest_generated_difference": 0.011}  # fmt: skip
    cases = [good, {**good, "name": "tp4", "problems": ["no answer"]}, {"name": "stock tp1", "problems": []},
             {"name": "odd", "refused": "RanksDiffer: rank 1\nmore", "problems": []}]  # fmt: skip
    document = {"gpus": 4, "cases": cases, "compiled": {"k": 1}, "processes_with_kernels": 9, "problems": ["late"],
                "not_run": {"x": "for want of GPUs"}}  # fmt: skip
    text = kept(tmp_path, "ranks", document)
    assert "| tp2 | tp1 | 144 | 0.0110 | ok |" in text and "| no answer |" in text and "stock tp1" not in text
    assert "RanksDiffer: rank 1" in text and "each once; 9 ranks" in text and "- late" in text
    assert "tp2: largest difference of each prompt 0.011; of vLLM's own on as many ranks 0.012." in text
    assert "Not run, for want of GPUs: x." in text


def test_launches(tmp_path):
    document = {"launches": 9000, "wanted": 10000, "seconds": 90.0, "failed": 1, "failures": ["launch 3: off"],
                "elements_compared": 12}  # fmt: skip
    assert "9,000 of 10,000 launches in 90 s, 1 outside" in (text := kept(tmp_path, "random-launches", document))
    assert "- launch 3: off" in text
