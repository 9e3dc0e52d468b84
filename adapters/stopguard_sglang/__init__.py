"""SGLang: its adapter for the gateway and the audit, its plugin, and how it is run on a machine without a GPU."""
