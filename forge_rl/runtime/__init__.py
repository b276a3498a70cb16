"""Process runtime: named meshes on hosts, services of replicas, routing, and fault handling."""

from forge_rl.runtime.monarch_log import secure_monarch_log

secure_monarch_log()  # before any module of this package imports Monarch
