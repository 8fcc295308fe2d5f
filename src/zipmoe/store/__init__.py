"""The packed folder: writing, reading, inspecting and verifying it."""
