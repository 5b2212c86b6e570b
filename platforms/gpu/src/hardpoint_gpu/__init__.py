"""What platforms of graphics processors share. Nothing here imports a framework before a worker is bound."""
