"""torch_npu's operators computed on the host. sitecustomize.py installs it; see device.py."""
