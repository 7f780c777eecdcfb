"""The vLLM versions whose kernels were read and run; docs/vllm.md says how to verify another."""

from lite.errors import InputError

VERIFIED = ("0.26.0",)


def require_verified_version() -> str:
    """-> the installed version. InputError names one that was not verified: its kernels may round elsewhere."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise InputError("vllm", "is not installed", "pip install '.[gpu]' in the checkout") from None
    if found.split("+")[0] not in VERIFIED:
        raise InputError("vllm", f"version {found} was not verified", f"install {' or '.join(VERIFIED)}, or see docs/vllm.md")
    return found
