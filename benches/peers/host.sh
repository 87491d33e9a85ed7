#!/usr/bin/env bash
# Runs a command on one of the hosts of `symmem bench --hosts`, which are network namespaces of this machine. The peers' launchers
# call it as they would call ssh.
#
#   host.sh [-OPTION...] host-H COMMAND...    the command is one of the shell, as with ssh
#
# $PEERS_SPACES has the hosts' namespaces, $PEERS_ADDRESSES their addresses. Besides its network a host has its own name,
# /dev/shm and System V memory, so that processes of two hosts find no memory that they could share.
set -u
while [[ ${1-} == -* ]]; do shift; done
name=$1
shift
read -ra spaces <<<"$PEERS_SPACES"
space=${spaces[${name#host-}]:?there is no such host}
inside() {
  hostname "$1" && mount -t tmpfs none /dev/shm && mount -t sysfs none /sys || exit 1 # /sys shows the network's devices
  local host=0 address
  echo 127.0.0.1 localhost >/dev/shm/.hosts
  for address in $PEERS_ADDRESSES; do echo "$address host-$((host++))"; done >>/dev/shm/.hosts
  mount --bind /dev/shm/.hosts /etc/hosts && eval "$2"
}
exec nsenter --net="$space" unshare --uts --ipc --mount bash -c "$(declare -f inside); inside \"\$@\"" "$0" "$name" "$*"
