"""The checks by name, in the order in which they are made."""

from collections.abc import Callable

from mlperf_bert.distributed.network_test.findings import NETWORK, Finding, Options, examined


def make(name: str, options: Options) -> list[Finding]:
    """Make one of LOCAL; it never raises."""
    return examined(name, lambda: _LOCAL[name](options), options.timeout_s)


# Imports are in the functions, so that what is not installed fails its own check and no other.
def _gpus(options: Options) -> list[Finding]:
    from bert_tools.doctor import gpus

    return gpus.check(options)


def _machine(options: Options) -> list[Finding]:
    from bert_tools.doctor import host

    return host.check_machine(options)


def _disk(options: Options) -> list[Finding]:
    from bert_tools.doctor import storage

    return storage.check_disk(options)


def _limits(options: Options) -> list[Finding]:
    from bert_tools.doctor import host

    return host.check_limits(options)


def _packages(options: Options) -> list[Finding]:
    from bert_tools.doctor import packages

    return packages.check(options)


def _data(options: Options) -> list[Finding]:
    from bert_tools.doctor import storage

    return storage.check_data(options)


def _caches(options: Options) -> list[Finding]:
    from bert_tools.doctor import host

    return host.check_caches(options)


_LOCAL: dict[str, Callable[[Options], list[Finding]]] = {
    "gpus": _gpus,
    "machine": _machine,
    "disk": _disk,
    "limits": _limits,
    "packages": _packages,
    "data": _data,
    "caches": _caches,
}
LOCAL = tuple(_LOCAL)
NAMES = (*LOCAL, NETWORK)
