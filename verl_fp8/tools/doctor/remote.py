"""Run :mod:`verl_fp8.tools.doctor.facts` in a process of its own. This module is sent to Ray's workers by value.

A node may lack this package, so nothing here imports anything but the standard library.
"""

import json
import subprocess
import sys
import tempfile


def gather(code: str, segments: str, sections: tuple[str, ...] = (), *, timeout: float) -> dict:
    """Run the source of the facts in a process of its own.

    Args:
        code: the source.
        segments: pattern of the weight sync's segments in /dev/shm.
        sections: names of those wanted; all if empty.
        timeout: seconds until the process is given up.

    Returns:
        section -> what was found, or ``{"error": one line}``; ``ended`` says why a process ended early.
    """
    found, ended = {}, None
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", code, segments, *sections]
    # A file for stderr: a pipe would fill up, or stay open in a process left behind.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=timeout)
            output = run.stdout
            if run.returncode:
                errors.seek(0)
                last = ([line.strip() for line in errors.read().splitlines() if line.strip()] or ["no message"])[-1]
                ended = f"the process ended with code {run.returncode}: {last[:300]}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout or ""
            output = output.decode() if isinstance(output, bytes) else output
            ended = f"no answer within {timeout:g} s"
    for line in output.splitlines():
        if line.startswith("verl_fp8-facts "):
            answer = json.loads(line.partition(" ")[2])
            found[answer["section"]] = {"error": answer["error"]} if "error" in answer else answer["found"]
    if ended is not None:
        found["ended"] = ended
    return found
