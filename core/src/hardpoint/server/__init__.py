"""The ASGI shell: keys, limits, error form, endpoint allow-list, route collisions. Needs ``hardpoint-core[server]``."""
