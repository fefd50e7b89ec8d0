"""Engines that kvcache can be switched into; nothing here is imported by kvcache."""
