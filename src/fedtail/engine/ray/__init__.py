"""Clients in actors of Ray, on the cores of this machine or of a cluster. Needs `pip install 'fedtail[ray]'`."""

from fedtail.engine.ray.ray_fleet import RayFleet

__all__ = ["RayFleet"]
