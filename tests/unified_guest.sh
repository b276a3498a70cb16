#!/bin/sh
# PID 1 of a Linux in user mode on this machine's files, with cgroups of version 2; see test_sandbox_unified.py.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t cgroup2 none /sys/fs/cgroup
cd /sys/fs/cgroup && echo "+cpu +memory +pids" > cgroup.subtree_control
program="${0%.sh}.py"
"$PYTHON" -B "$program" standard
if [ -z "$OTHER_PYTHON" ]; then
    "$PYTHON" -B "$program" process
else
    # A subtree that is another user's, as systemd delegates one.
    mkdir user user/own
    chown 65534 user user/cgroup.procs user/cgroup.subtree_control user/own user/own/cgroup.procs
    echo "+cpu +memory +pids" > user/cgroup.subtree_control
    echo $$ > user/own/cgroup.procs
    for profile in strict process; do
        setpriv --reuid 65534 --regid 65534 --clear-groups "$OTHER_PYTHON" -B "$program" $profile
    done
    echo $$ > cgroup.procs
fi
echo 0 > /proc/sys/user/max_user_namespaces
"$PYTHON" -B "$program" strict
echo o > /proc/sysrq-trigger
sleep 60
