"""The user's two options. Read before any of vLLM's modules: no torch here."""

from dataclasses import dataclass

# A calibrated input scale is amax / 2688: public checkpoints lie between 5.6e-4 and 3.8e-2. 1e4 would be an activation
# of 2.7e7, far outside bf16 networks that work; only memory that nobody wrote gets there.
LARGEST_SCALE = 1e4
SMALLEST_SCALE = 2.0**-126  # of normal fp32 numbers


@dataclass(frozen=True)
class Policy:
    """`all_missing`: "route" to W4A16, "refuse", or the input scale to use. `some_bad`: "repair" or "refuse"."""

    all_missing: str | float = "route"
    some_bad: str = "repair"
