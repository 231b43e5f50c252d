"""The storage tier: pages of the KV cache that outlive the process, by content. See docs/tiers.md."""
