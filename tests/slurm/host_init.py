"""What runs as process 1 of a host of the test cluster? (started by cluster.py; sets the host up, then reaps orphans)

Arguments: the host's name, its /etc/hosts file. Says "up" once the namespaces are furnished.
"""

import os
import socket
import subprocess
import sys
import time

REAP_S = 0.05


def main() -> None:
    name, hosts_file = sys.argv[1:]
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", hosts_file, "/etc/hosts"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("up", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(REAP_S)


if __name__ == "__main__":
    main()
