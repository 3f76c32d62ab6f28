"""The recipes, also as `roll_lite.recipes`: each is a script to run, copy and edit."""
