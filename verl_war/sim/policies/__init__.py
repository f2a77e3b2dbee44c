"""Routing and admission policies of the simulator: stock verl, WAR and its parts, and what others do."""
