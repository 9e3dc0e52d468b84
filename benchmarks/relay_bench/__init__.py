"""The relay comparison: what a proxy in front of an inference engine costs, and how fast it passes a stop on.

One idea a module:

- ``wire``            what travels: the request bytes and the program that tells the upstream stub how to answer
- ``upstream``        the stub engine, a process of its own; ``upstream_watch`` is the harness's view of it
- ``bare_relay``, ``fastapi_proxy``  two of the peers, written here
- ``install``         virtual environments and system packages of the peers
- ``processes``       launching, pinning to processors, processor-time accounting
- ``peers``           the table of peers: how each is installed and started
- ``load``            throughput, latency and processor time of small requests and of streams
- ``windows``         client close -> upstream close, in six windows
- ``rounds``          measurements interleaved peer by peer, in rounds
- ``measures``        the catalogue of figures
- ``summary``         medians, spreads, ratios to nginx, verdicts on the targets
- ``report``          tables, Markdown, JSON
"""
