"""What `import vllm` does with the overlay in front: the checks, the one line, and every way to refuse."""

import subprocess
from pathlib import Path

import pytest

from overlay.sources import VllmSources
from tests.startup.standin import PYTHON, ROOT, environment, make

TWICE = """
import sys
for attempt in range(2):
    try:
        import vllm
    except RuntimeError as error:
        print(type(error).__name__, error)
    else:
        print("imported")
"""


def run(code: str, *paths: Path, stdin: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    env = environment(ROOT, *paths, **settings)
    return subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("site"))


def config(directory: Path, text: str) -> str:
    (directory / "my.toml").write_text(text)
    return str(directory / "my.toml")


def test_one_line_for_a_process(vllm: Path):
    done = run("import os, vllm; import vllm.version; print(os.getpid())", vllm)
    version = VllmSources(vllm / "vllm").version
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"overlay[pid {done.stdout.strip()}]: ")
    assert f"(vllm {version}, no GPU)" in lines[0] or "sm_" in lines[0]


def test_everything_off_is_said_too(vllm: Path, tmp_path: Path):
    from overlay.registry import PATCH_IDS

    text = "".join(f"[patches.{patch}]\nenabled = false\n" for patch in PATCH_IDS)
    done = run("import vllm", vllm, OVERLAY_CONFIG=config(tmp_path, text))
    assert f": {len(PATCH_IDS)} off (vllm" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[overlay]\nstrct = true\n", "my.toml:2: overlay.strct is not a known name; did you mean 'strict'?"),
        ("[overlay]\nstrict = 1\n", "my.toml:2: overlay.strict must be bool, not int (1)"),
        ("[overlay]\nlog = 'loud'\n", "my.toml:2: overlay.log is 'loud'; it must be one of 'debug', 'info'"),
        ("overlay = 3\n", "my.toml:1: overlay must be a table"),
        ("\n[patch.sparse_mla]\n", "my.toml:2: patch is not a known name; did you mean 'patches'?"),
        ("[patches.sparse_mlo]\n", "my.toml:1: patches.sparse_mlo is not a known name; did you mean 'sparse_mla'?"),
        (
            "[patches.sparse_mla]\nenabled = 'on'\n",
            "my.toml:2: patches.sparse_mla.enabled is 'on'; it must be \"auto\"",
        ),
        ("[patches]\nsparse_mla = true\n", "my.toml:2: patches.sparse_mla must be a table"),
        (
            "[patches.sparse_mla]\nenable = true\n",
            "my.toml:2: patches.sparse_mla.enable is not a known name; did you mean 'enabled'?",
        ),
        ("[overlay\n", "my.toml: is not valid TOML:"),
    ],
)
def test_a_bad_file_stops_every_import_of_vllm(vllm: Path, tmp_path: Path, text: str, said: str):
    done = run(TWICE, vllm, OVERLAY_CONFIG=config(tmp_path, text))
    assert done.stdout.count("ConfigError") == 2
    assert done.stdout.count(said) == 2


def test_an_absent_unreadable_or_binary_file(vllm: Path, tmp_path: Path):
    assert "no such file; set OVERLAY_CONFIG" in run(TWICE, vllm, OVERLAY_CONFIG=str(tmp_path / "none.toml")).stdout
    assert "cannot be read: Is a directory" in run(TWICE, vllm, OVERLAY_CONFIG=str(tmp_path)).stdout
    (tmp_path / "my.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in run(TWICE, vllm, OVERLAY_CONFIG=str(tmp_path / "my.toml")).stdout


def test_an_empty_file_means_the_defaults(vllm: Path, tmp_path: Path):
    by_default = run("import vllm", vllm).stderr.split("]: ")[1]
    assert run("import vllm", vllm, OVERLAY_CONFIG=config(tmp_path, "")).stderr.split("]: ")[1] == by_default


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("sparse_mla", "OVERLAY_PATCHES: 'sparse_mla' is not of the form id=auto, id=true or id=false"),
        ("sparse_mla=yes", "OVERLAY_PATCHES: 'sparse_mla=yes' is not of the form"),
        ("sparse_mal=true", "OVERLAY_PATCHES: 'sparse_mal' is not a patch; did you mean 'sparse_mla'?"),
    ],
)
def test_bad_overrides(vllm: Path, value: str, said: str):
    assert run(TWICE, vllm, OVERLAY_PATCHES=value).stdout.count(said) == 2


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = (VllmSources.find().root / "platforms/cuda.py").read_text()
    changed = source.replace("selected_backend: AttentionBackendEnum | None,\n        attn", "chosen,\n        attn")
    assert changed != source
    return make(tmp_path_factory.mktemp("drifted"), {"platforms/cuda.py": changed})


def test_a_target_that_changed_stops_vllm_with_both_signatures(drifted: Path):
    done = run(TWICE, drifted)
    assert done.stdout.count("PatchError patch sparse_mla is wanted and cannot be applied") == 2
    assert "target vllm.platforms.cuda:CudaPlatformBase.get_attn_backend_cls has changed" in done.stdout
    assert "expected: (cls, selected_backend, attn_selector_config, num_heads=...)" in done.stdout
    assert "found:    (cls, chosen, attn_selector_config, num_heads=...)" in done.stdout
    assert "OVERLAY_PATCHES=sparse_mla=false" in done.stdout


def test_the_way_out_that_the_message_names_works(drifted: Path):
    assert run(TWICE, drifted, OVERLAY_PATCHES="sparse_mla=false").stdout.split() == ["imported", "imported"]


def test_not_strict_goes_on_and_says_so(drifted: Path, tmp_path: Path):
    done = run(TWICE, drifted, OVERLAY_CONFIG=config(tmp_path, "[overlay]\nstrict = false\n"))
    assert done.stdout.split() == ["imported", "imported"]
    assert "patch sparse_mla is wanted and cannot be applied" in done.stderr
    assert "1 failed" in done.stderr


def test_a_target_that_is_gone(tmp_path: Path):
    done = run(TWICE, make(tmp_path, {"platforms/cuda.py": ""}), OVERLAY_PATCHES="sparse_mla=true")
    assert "does not define CudaPlatformBase.get_attn_backend_cls" in done.stdout


@pytest.mark.parametrize(
    ("package", "pip"), [("wrapt", "pip install 'wrapt>=2.5,<3'"), ("cupy", "pip install 'cupy-cuda12x>=14.2,<15'")]
)
def test_a_missing_package_is_named_with_the_pip_line(vllm: Path, package: str, pip: str):
    done = run(f"import sys; sys.modules[{package!r}] = None\n" + TWICE, vllm, OVERLAY_PATCHES="sparse_mla=true")
    assert f"the package {package} is not installed: {pip}" in done.stdout


def test_a_wrapt_that_is_too_old_is_named(vllm: Path):
    code = "import importlib.metadata as m; m.version = lambda name: '2.4.1'\n" + TWICE
    assert "wrapt 2.4.1 is too old, 2.5 brought the removal of wrappers: pip install" in run(code, vllm).stdout


def test_a_cupy_that_is_too_old_is_named():
    """Where the first thing to miss it would be the kernel, after the weights; by the patch that needs it."""
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "13.6.0" if name == "cupy-cuda12x" else real(name)
from overlay import registry
from overlay.patches import process_proof, sparse_mla
print(registry._missing(sparse_mla.PATCH))
print(registry._missing(process_proof.PATCH))
"""
    answer = run(code).stdout.splitlines()
    assert answer[0].startswith("cupy-cuda12x 13.6.0 is too old, 14.2 finds the NVRTC that torch brings: pip install")
    assert answer[1] == "None"


@pytest.mark.parametrize("version", ["0.1.dev20051+g0123abc", "0.34.0", "0.26.0"])
def test_an_untested_version_warns_and_goes_on(tmp_path: Path, version: str):
    done = run(TWICE, make(tmp_path, {"_version.py": f"__version__ = version = {version!r}\n"}))
    assert done.stdout.split() == ["imported", "imported"]
    assert f"vllm {version} is outside the tested releases: patches go by signature and probe" in done.stderr


def test_no_vllm_is_pythons_own_error():
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\nimport vllm"
    done = run(code)
    assert "ModuleNotFoundError: No module named 'vllm'" in done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_are_patched_too(vllm: Path, method: str):
    code = f"""
import multiprocessing, sys
def states():
    import vllm
    from overlay import startup
    return [str(entry.state) for entry in startup.current().entries]
def child(queue):
    queue.put(states())
if __name__ == "__main__":
    here = states()
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60) == here, len(here) > 0)
    process.join()
"""
    script = vllm / f"{method}.py"
    script.write_text(code)
    done = subprocess.run(
        [PYTHON, str(script)], env=environment(ROOT, vllm), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert done.stderr.count("overlay[pid") == (1 if method == "fork" else 2)


def test_threads_that_import_at_once_arm_once(vllm: Path):
    code = """
import threading
start = threading.Barrier(8)
def work():
    start.wait()
    import vllm
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    done = run(code, vllm)
    assert done.returncode == 0
    assert done.stderr.count("overlay[pid") == 1
