"""What the program ends with, beyond 0: the statuses of docs/cluster.md, which launchers act on."""

FAULT = 1  # of ours, with a traceback
MISTAKE = 2  # that the user can mend, in one line; argparse has the same
TARGET_MISSED = 3
LOST = 70  # other ranks are gone or do not answer, or something hangs
STOPPED = 75  # a signal asked for the end: after saving, or before there was anything to save
INTERRUPTED = 130  # as of what SIGINT ends, which a second Ctrl-C does
NOBODY_READS = 141  # as of what SIGPIPE ends: `| head` has seen enough
