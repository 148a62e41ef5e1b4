"""Publishing from trainers: where their loops call us."""
