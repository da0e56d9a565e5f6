"""Runs PyKMIP's server until standard input ends: then it kills its process group and removes its
directory, so that it cannot outlive a test, however that ends.

usage: python -c THIS CONFIGURATION LOG DIRECTORY
"""
import os
import shutil
import signal
import sys
import threading

from kmip.services.server.server import KmipServer

configuration, log, directory = sys.argv[1:]


def end_with_parent():
    # Not through sys.stdin: its lock would be held when PyKMIP forks its second process.
    os.read(0, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


threading.Thread(target=end_with_parent, daemon=True).start()
server = KmipServer(config_path=configuration, log_path=log)
with server:
    server.serve()
