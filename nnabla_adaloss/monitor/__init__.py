# SPDX-License-Identifier: Apache-2.0
"""Events of a training, monitors that receive them, and recordings that can be queried."""
