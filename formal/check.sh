#!/bin/sh
# Checks the model: the right one in all its states, and that each known-bad variant is caught.
# Prints one line for each; fails when anything is not as it is said. Needs spin and a C compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# check NAME EXPECTED SPIN_FLAGS PAN_FLAGS: EXPECTED is `holds` or the text of the broken assertion.
check() {
	name=$1 expected=$2 flags=$3 run=$4
	rm -f pan* *.trail
	# shellcheck disable=SC2086  # flags are words
	spin -a $flags "$here/lease.pml" >spin.txt
	# shellcheck disable=SC2086
	cc -O2 -w -DCOLLAPSE $5 -o pan pan.c
	# shellcheck disable=SC2086
	./pan -m200000 $run >pan.txt 2>&1 || true
	states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.txt)
	if grep -q 'errors: 0' pan.txt && ! grep -q 'max search depth too small' pan.txt; then
		found=holds
	else
		found=$(sed -n 's/^pan:[0-9]*: \(.*\) (at depth.*/\1/p' pan.txt | head -n 1)
	fi
	printf '%-20s %-10s states  %s\n' "$name" "$states" "$found"
	case $found in
	*"$expected"*) ;;
	*)
		echo "  expected: $expected" >&2
		cat pan.txt >&2
		exit 1
		;;
	esac
}

check safety holds "" "-noclaim" "-DSAFETY -DNOCLAIM"
check progress holds "-DMISFORTUNES=1" "-a -f -N ends" "-DNFAIR=4"
check GUARD_STATE_ONLY "owner==me" "-DGUARD_STATE_ONLY" "-noclaim" "-DSAFETY -DNOCLAIM"
check TOKEN_REUSED "assertion violated" "-DTOKEN_REUSED" "-noclaim" "-DSAFETY -DNOCLAIM"
check CANCEL_BY_MESSAGE "cancel_accepted" "-DCANCEL_BY_MESSAGE" "-noclaim" "-DSAFETY -DNOCLAIM"
check ACK_BEFORE_COMMIT "told_seq<=seq" "-DACK_BEFORE_COMMIT" "-noclaim" "-DSAFETY -DNOCLAIM"
