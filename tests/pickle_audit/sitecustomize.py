"""On PYTHONPATH of a run, every process notes what it takes out of pickles (test_no_pickle.py).

One JSON line in the file that PICKLE_AUDIT names for each process, and for each class or function
that an unpickler looks up: who unpickles, and numba's file where it is numba.
"""

import json
import os
import sys
import traceback

_LOG = os.environ["PICKLE_AUDIT"]


def _note(**entry):
    line = json.dumps({"pid": os.getpid(), "rank": os.environ.get("RANK"), **entry}) + "\n"
    descriptor = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _hook(event, arguments):
    if event == "pickle.find_class":
        frame = sys._getframe(1)
        cache = None
        if frame.f_globals.get("__name__") == "numba.core.caching":
            cache = os.path.dirname(frame.f_locals["self"]._index_path)
        callers = [f"{at.filename}:{at.name}" for at in traceback.extract_stack(frame)[-6:]]
        _note(found=".".join(arguments), cache=cache, callers=callers)


sys.addaudithook(_hook)
_note(command=sys.orig_argv)
