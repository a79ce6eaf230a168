"""What judges a program: check, verify, frozen, advise, explain, doctor, and the runner of scripts below them."""
