"""The hostile corpus: requests, files, disks and sockets that try to stop the server, and what each must get.

`python -m bench.hostile` runs the requests at length against a real server.
"""
