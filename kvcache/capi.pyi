from types import CapsuleType

API: CapsuleType
