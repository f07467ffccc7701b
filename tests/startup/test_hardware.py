"""What a process believes of its GPUs: empty variables, mixed machines, none at all; and which patches follow."""

import pytest

from overlay import config, registry
from overlay.hardware import Device, Hardware
from overlay.sources import VllmSources
from tests.conftest import run_python

PATCHES = list(registry.declarations())
RTX = Device("NVIDIA GeForce RTX 5090", (12, 0), False)
SCREEN = Device("NVIDIA GeForce RTX 3060", (8, 6), False)
GB10 = Device("NVIDIA GB10", (12, 1), True)
SEEN = "import json\nfrom overlay.hardware import Hardware\nprint(json.dumps(Hardware().architecture))"


def machine(*devices: Device) -> Hardware:
    found = Hardware()
    found.devices = devices
    return found


def states(*devices: Device) -> dict[str, str]:
    entries = registry.decide(PATCHES, config.load(PATCHES, {}), VllmSources.find(), machine(*devices))
    return {entry.patch.id: str(entry.state) for entry in entries}


@pytest.mark.parametrize(
    ("visible", "architecture"), [(None, "sm_120"), ("", "sm_120"), ("0", "sm_120"), ("7", "no GPU"), ("-1", "no GPU")]
)
def test_an_empty_variable_counts_as_unset(fake_driver, visible: str | None, architecture: str):
    """As in vLLM's platform: Ray empties it where a placement group has no GPUs."""
    env = {key: value for key, value in fake_driver((12, 0)).items() if key != "CUDA_VISIBLE_DEVICES"}
    assert run_python(SEEN, env if visible is None else {**env, "CUDA_VISIBLE_DEVICES": visible}) == architecture


@pytest.mark.parametrize("devices", [(RTX, SCREEN), (SCREEN, RTX)])
def test_a_second_card_of_another_family_retires_nothing(devices):
    assert states(*devices) == states(RTX)


def test_a_machine_without_the_family_stands_down():
    assert states(SCREEN)["sparse_mla"] == states(SCREEN, SCREEN)["indexer_topk"] == "retired"


@pytest.mark.parametrize(
    ("devices", "lacks", "architecture"),
    [
        ((), False, "no GPU"),
        ((RTX,), False, "sm_120"),
        ((SCREEN,), True, "sm_86"),
        ((SCREEN, RTX, SCREEN), False, "sm_86 + sm_120"),
        ((GB10, RTX), False, "sm_121 + sm_120"),
    ],
)
def test_a_family_is_lacking_only_where_no_gpu_is_of_it(devices, lacks: bool, architecture: str):
    found = machine(*devices)
    assert (found.lacks(12), found.architecture) == (lacks, architecture)
    assert (found.name, found.capability) == ((devices[0].name, devices[0].capability) if devices else (None, None))


def test_none_is_a_machine_without_a_gpu():
    assert Hardware.none().devices == ()
