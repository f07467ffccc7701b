"""Takes a person out of a report: names, hosts, addresses and every path that is not the operating system's own."""

import getpass
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from overlay.config import ROOT

# Accounts that images and clouds come with: no person's name, and words that a report needs.
COMMON_ACCOUNTS = {"root", "user", "ubuntu", "nvidia", "vllm", "docker", "admin", "nobody", "runner", "app"}
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/proc", "/sys", "/dev", "/etc")
_REST = r"[^\s'\",;:()\[\]<>]*"
_PATH = re.compile(rf"(?<![\w/.<>-])(?:~|/){_REST}")
_PATTERNS = (
    (re.compile(r"\b[a-z]+://\S+"), "<url>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+"), "<mail>"),
    (re.compile(r"\b(?:hf_|sk-|ghp_)\w{8,}"), "<token>"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{13,}", re.I), "<uuid>"),
    (re.compile(r"(?<![=\w.-])(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}(?![\w:])", re.I), "<address>"),
)


def clean(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without what identifies a person or a machine. Version numbers, sizes and system paths stay."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    for folder, name in _known_folders(environ):
        text = re.sub(rf"{re.escape(folder)}(?=[/\s'\",;:)\]]|$)", name, text)
    # After any other known folder, the rest of a path is that folder's own layout.
    text = re.sub(rf"<home>{_REST}", "<home>", text)
    text = _PATH.sub(lambda found: found[0] if _is_system(found[0]) else "<path>", text)
    for name in sorted(_names(environ), key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<name>", text, flags=re.I)
    return text


def _known_folders(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Folders whose meaning helps a reader, the longest first."""
    known = {
        str(ROOT): "<overlay>",
        sysconfig.get_path("purelib"): "<site-packages>",
        sysconfig.get_path("platlib"): "<site-packages>",
        str(Path(sys.executable).parent): "<bin>",
        sys.prefix: "<environment>",
        sys.base_prefix: "<python>",
        environ.get("HOME") or os.path.expanduser("~"): "<home>",
    }
    real = {os.path.realpath(folder): name for folder, name in known.items()}
    folders = {folder: name for folder, name in {**real, **known}.items() if not _is_system(folder)}
    return sorted(folders.items(), key=lambda item: -len(item[0]))


def _is_system(path: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in SYSTEM_FOLDERS)


def _names(environ: Mapping[str, str]) -> set[str]:
    """The account, its home folder's name, the person's name in the account data, and the host."""
    names = {environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER", "HOSTNAME")}
    names |= {os.path.basename(os.path.expanduser("~")), os.path.basename(environ.get("HOME", ""))}
    host = socket.gethostname()
    names |= {host, host.partition(".")[0]}
    try:
        import pwd

        account = pwd.getpwuid(os.getuid())
        names |= {account.pw_name, getpass.getuser(), *re.split(r"[\s,]+", account.pw_gecos)}
    except (KeyError, OSError):  # a container's user number without an entry
        pass
    return {name for name in names if len(name) > 2 and name.lower() not in COMMON_ACCOUNTS}
