"""compile_cache against vLLM's real cache keys."""

import pytest

CACHES = ["piecewise", "ahead of time", "plan"]


@pytest.fixture
def keys(answer):
    return answer("compile_cache")


@pytest.mark.parametrize("cache", CACHES)
def test_stock_keys_do_not_see_a_toggle(keys, cache):
    assert keys["stock"][cache] == keys["stock, switch"][cache]


@pytest.mark.parametrize("cache", CACHES)
def test_the_same_patch_set_has_the_same_key(keys, cache):
    assert keys["here"][cache] == keys["same"][cache] != keys["stock"][cache]


@pytest.mark.parametrize("change", ["switch", "option"])
@pytest.mark.parametrize("cache", CACHES)
def test_another_switch_or_option_has_another_key(keys, cache, change):
    assert keys[change][cache] not in (keys["here"][cache], keys["stock"][cache])
