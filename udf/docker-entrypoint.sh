#!/usr/bin/env bash
# Runs PostgreSQL as user postgres, making cluster, database and extension on an empty volume; runs anything else as is.
# The password is POSTGRES_PASSWORD or, without it, a random one; either way it is kept where PGPASSFILE says, so that
# containers sharing that volume need not be told. Both count only when the cluster is made.
set -euo pipefail

[[ ${1:-} == postgres ]] || exec "$@"

keep_password() {
    local escaped
    escaped=$(printf %s "$1" | sed 's/[\\:]/\\&/g')
    rm -f "$PGPASSFILE"
    (umask 077 && printf '*:*:*:postgres:%s\n' "$escaped" > "$PGPASSFILE")
}

# A server nobody can find yet, or a health check would call the half-made database healthy.
create_database() {
    local hidden
    hidden=$(mktemp -d)
    trap "pg_ctl stop -s -m immediate -D '$1'; rm -rf '$hidden'" EXIT
    pg_ctl start -s -w -D "$1" -l "$hidden/log" -o "-c listen_addresses='' -c unix_socket_directories='$hidden'" ||
        { cat "$hidden/log" >&2; return 1; }
    psql -qX -v ON_ERROR_STOP=1 -h "$hidden" -U postgres -d postgres -c "CREATE DATABASE bismarck"
    psql -qX -v ON_ERROR_STOP=1 -h "$hidden" -U postgres -d bismarck -c "CREATE EXTENSION bismarck_dp CASCADE"
    pg_ctl stop -s -w -m fast -D "$1"
    trap - EXIT
    rm -rf "$hidden"
}

# Under another name, renamed when whole: a container killed half way starts over.
initialise() {
    local draft=$PGDATA.new password=${POSTGRES_PASSWORD:-}
    [[ -n $password ]] || password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    rm -rf "$draft"
    initdb -D "$draft" -U postgres -E UTF8 --locale=C.UTF-8 --auth-local=peer --auth-host=scram-sha-256 \
        --pwfile=<(printf '%s\n' "$password") > /dev/null
    printf '%s\n' 'local all all peer' 'host all all all scram-sha-256' > "$draft/pg_hba.conf"
    create_database "$draft"
    keep_password "$password"
    mv "$draft" "$PGDATA"
    echo "made database bismarck; the password of user postgres is in $PGPASSFILE" >&2
}

[[ -e $PGDATA ]] || initialise
unset POSTGRES_PASSWORD
exec "$@" -c listen_addresses='*'
