"""The overlay's lines under logging configurations of the user's, applied by vLLM's own code."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.startup.standin import ROOT, environment, make

# Each file in a forked child: what a configuration changes is this process's for good. From 0.33 vLLM configures
# logging when it has parsed its arguments, and in each process that it starts; before, when vllm.logger is imported.
CODE = """
import json, logging, os, sys, vllm
from overlay import startup
logs = [logging.getLogger("others"), logging.getLogger("overlay"), startup.current().entries[0].context.log]
import vllm.logger
if hasattr(vllm.logger, "configure_logging"):
    from vllm.config.logging import LoggingConfig
    configure = lambda: vllm.logger.configure_logging(LoggingConfig())
else:
    configure = vllm.logger._configure_vllm_root_logger
answers = {}
for name in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = name
        for _ in range(2):
            configure()
            for log in logs:
                log.info("info of %s", log.name)
                log.error("error of %s", log.name)
        os._exit(0)
    os.close(write)
    with open(read) as said:
        answers[os.path.basename(name)] = [line for line in said.read().splitlines() if " of o" in line]
    os.wait()
print(json.dumps(answers))
"""
HANDLER = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "mine"}
FORMAT = {"version": 1, "formatters": {"mine": {"format": "mine %(message)s"}}, "handlers": {"mine": HANDLER}}
# All of them leave disable_existing_loggers at its default, which is true.
FILES = {
    "unnamed": {"root": {"level": "INFO", "handlers": ["mine"]}},
    "level and handlers": {"loggers": {"overlay": {"level": "ERROR", "handlers": ["mine"]}}},
    "level": {"loggers": {"overlay": {"level": "INFO"}}, "root": {"level": "WARNING", "handlers": ["mine"]}},
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines by file, with the process id in their prefix left out."""
    folder: Path = tmp_path_factory.mktemp("logging")
    for name, changes in FILES.items():
        (folder / name).write_text(json.dumps({**FORMAT, **changes}))
    env = environment(ROOT, make(folder / "site"))
    answers = run_python(CODE, env, *(str(folder / name) for name in FILES))
    return {name: [line.partition("]: ")[2] or line for line in lines] for name, lines in answers.items()}


def test_a_file_that_does_not_name_them_does_not_silence_them(said):
    lines = ["info of overlay", "error of overlay", "info of overlay.sparse_mla", "error of overlay.sparse_mla"]
    assert said["unnamed"] == lines * 2  # and "others", which it does not name either, is silent


def test_a_level_and_handlers_that_it_gives_them_are_taken(said):
    assert said["level and handlers"] == ["mine error of overlay", "mine error of overlay.sparse_mla"] * 2


def test_a_level_alone_leaves_them_the_roots_handlers(said):
    lines = ["info of overlay", "error of overlay", "info of overlay.sparse_mla", "error of overlay.sparse_mla"]
    assert said["level"] == [f"mine {line}" for line in lines] * 2
