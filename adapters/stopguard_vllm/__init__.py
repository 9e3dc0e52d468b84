"""vLLM: the proxy's side (`adapter`), the engine's side (`plugin`), and how to install the real one (`rig`)."""
