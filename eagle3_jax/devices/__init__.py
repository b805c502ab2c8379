"""Code for devices: kernels, meshes, groups of rows, and the cache of compiled programs."""
