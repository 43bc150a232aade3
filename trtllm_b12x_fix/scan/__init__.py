"""What a backend's conversion does to every block scale of a checkpoint, from byte histograms.

A baked scale depends on its byte and on ``weight_scale_2`` alone, so 256 counts per projection and
expert give the exact error of the conversion; no float tensor is read and no GPU is needed.
"""
