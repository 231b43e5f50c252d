"""Low-rank adapters (LoRA, Hu et al., 2021) beside one model: files, names, and what ranks are told. Torch-free."""
