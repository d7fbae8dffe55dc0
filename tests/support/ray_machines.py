"""A Ray cluster of a head and two machines of one core, each with a home of its own: `python ray_machines.py FOLDER`.

Prints its address; ends the second machine at a line of input, as when its power is cut, and everything at its end.
"""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.2"})
machines = [
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2", env_vars={"RM_OPT_HOME": f"{sys.argv[1]}/{name}"})
    for name in ("one", "two")
]
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(machines[1], allow_graceful=False)
    print("ended", flush=True)
    sys.stdin.readline()
cluster.shutdown()
