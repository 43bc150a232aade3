"""What a b12x kernel computes, on any CPU or GPU: families, contracts, arithmetic, traces.

Start at :mod:`.contract` (what differs between FlashInfer versions) and :mod:`.moe` (one launch,
every stage kept). :mod:`.reference` holds the published arithmetic and the fp64 truth.
"""
