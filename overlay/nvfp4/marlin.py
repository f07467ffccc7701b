"""Marlin's log line about the GPU: on Blackwell it states the opposite of what is true."""

import logging

FALSE_LINE = "Your GPU does not have native support for FP4"
TRUE_LINE = (
    "NVFP4 weights are computed with 16-bit activations here (W4A16, Marlin). This GPU has FP4 tensor cores; they need "
    "quantised activations, for which these layers have no scales or another backend was asked for."
)


def correct(record: logging.LogRecord) -> bool:
    """A logging filter that keeps every record and rewrites the false one."""
    if isinstance(record.msg, str) and record.msg.startswith(FALSE_LINE):
        record.msg, record.args = TRUE_LINE, None
    return True
