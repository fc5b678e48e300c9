/*
 * debit.c: the ledger's one way in. A debit is committed before a row's values are read, and nothing takes it back.
 *
 * The caller's transaction is the caller's: whatever it writes, ROLLBACK, a savepoint or a killed backend undoes. So a
 * debit is made by a background worker, in a transaction of its own, and the caller waits for it. Debits of one table
 * stand in line for a lock that no SQL statement can take; the sums are looked at, and the entry is made, within it.
 * A caller that goes away while it waits has paid, or not; it has seen nothing.
 *
 * The worker sees committed entries only: a table that the caller itself has protected and not committed is refused.
 */
#include "bismarck_dp.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "commands/event_trigger.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/dsm.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/regproc.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/wait_event.h"

PG_FUNCTION_INFO_V1(dp_debit);
PG_FUNCTION_INFO_V1(dp_source_in);
PG_FUNCTION_INFO_V1(dp_source_out);
PG_FUNCTION_INFO_V1(dp_protected_now);
PG_FUNCTION_INFO_V1(dp_append_only);
PG_FUNCTION_INFO_V1(dp_forget_dropped);

PGDLLEXPORT void dp_debit_main(Datum segment);

#define LONGEST_OUTCOME 16
#define SLOT_PATIENCE 5000 /* milliseconds that a worker slot may take to become free */
#define SLOT_PAUSE 20

/* What caller and worker share. */
typedef struct Slip {
    Oid database;
    Oid ledger;      /* the table of entries */
    uint32 table_id; /* of the protected table, in the protected tables' own numbers */
    char outcome[LONGEST_OUTCOME];
    int64 entry;
    char request[FLEXIBLE_ARRAY_MEMBER]; /* jsonb, as text */
} Slip;

/*
 * Paid if, with this release, Renyi divergences stay within their bound, or simple sums within theirs, or there is no
 * other release and it stays within all (bismarck_dp/budget.py has the proof). Sums are of decimal numbers: exact.
 * The caller may look at an old snapshot: what was found there about who may train on what must hold now.
 * A protection that is just being changed, by the caller perhaps, is none: what it will be is not known. One that
 * another owner has made may be another table's, of the same number, that went without our hearing of it.
 */
static const char *const entry_statement =
    "INSERT INTO bismarck_dp.entry (protected, source, who, login, verb, model, spec, event, adjacency,"
    "                               privacy_unit, unit_rows, renyi_order, rho, slack, epsilon, delta,"
    "                               total_epsilon, total_delta, composition, outcome,"
    "                               releases, unpriced, sum_rho, sum_slack, sum_epsilon, sum_delta)"
    " SELECT p.id, r.source, r.who, r.login, r.verb, r.model, r.spec, r.event, r.adjacency,"
    "  r.privacy_unit, r.unit_rows, r.renyi_order, r.rho, r.slack, r.epsilon, r.delta,"
    "  p.epsilon, p.delta, p.composition, CASE WHEN o.paid THEN 'paid' ELSE 'refused' END,"
    "  CASE WHEN o.paid THEN s.releases OPERATOR(pg_catalog.+) 1 END,"
    "  CASE WHEN o.paid THEN s.unpriced OPERATOR(pg_catalog.+) (r.rho IS NULL)::pg_catalog.int4 END,"
    "  CASE WHEN o.paid THEN s.rho OPERATOR(pg_catalog.+) coalesce(r.rho, 0) END,"
    "  CASE WHEN o.paid THEN s.slack OPERATOR(pg_catalog.+) r.slack END,"
    "  CASE WHEN o.paid THEN s.epsilon OPERATOR(pg_catalog.+) r.epsilon END,"
    "  CASE WHEN o.paid THEN s.delta OPERATOR(pg_catalog.+) r.delta END"
    " FROM pg_catalog.jsonb_populate_record(NULL::bismarck_dp.entry, $1) AS r"
    " JOIN bismarck_dp.protected AS p ON p.id OPERATOR(pg_catalog.=) r.protected AND p.active"
    "  AND p.source::pg_catalog.oid OPERATOR(pg_catalog.=) ($1 OPERATOR(pg_catalog.->>) 'table')::pg_catalog.oid"
    "  AND p.adjacency OPERATOR(pg_catalog.=) r.adjacency AND p.privacy_unit IS NOT DISTINCT FROM r.privacy_unit"
    "  AND p.unit_rows OPERATOR(pg_catalog.=) r.unit_rows AND p.renyi_order IS NOT DISTINCT FROM r.renyi_order"
    "  AND pg_catalog.jsonb_build_object('analysts', p.analysts, 'columns', p.columns)"
    "   OPERATOR(pg_catalog.=) ($1 OPERATOR(pg_catalog.->) 'terms')"
    " JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) p.source::pg_catalog.oid"
    "  AND pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text OPERATOR(pg_catalog.=) p.owner,"
    " LATERAL bismarck_dp.spent(p.id) AS s,"
    " LATERAL (SELECT coalesce("
    "   s.mixed OPERATOR(pg_catalog.=) 0"
    "   AND (s.unpriced OPERATOR(pg_catalog.=) 0 AND s.rho OPERATOR(pg_catalog.+) r.rho OPERATOR(pg_catalog.<=) p.rho"
    "     AND s.slack OPERATOR(pg_catalog.+) r.slack OPERATOR(pg_catalog.<=) p.slack"
    "    OR s.epsilon OPERATOR(pg_catalog.+) r.epsilon OPERATOR(pg_catalog.<=) p.epsilon"
    "     AND s.delta OPERATOR(pg_catalog.+) r.delta OPERATOR(pg_catalog.<=) p.summed_delta"
    "    OR s.releases OPERATOR(pg_catalog.=) 0 AND r.epsilon OPERATOR(pg_catalog.<=) p.epsilon"
    "     AND r.delta OPERATOR(pg_catalog.<=) p.delta), false) AS paid) AS o"
    " FOR SHARE OF p SKIP LOCKED"
    " RETURNING outcome, id";

/* ---- the worker ---- */

static void
set_for_worker(const char *name, const char *value)
{
    SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

static void
make_entry(Slip *slip)
{
    Oid types[] = {JSONBOID};
    Datum values[1];
    SPIPlanPtr plan;

    values[0] = DirectFunctionCall1(jsonb_in, CStringGetDatum(slip->request));
    SPI_connect();
    /* Others wait for the lock: a process that knows no catalog yet reads them before it stands in line. */
    PushActiveSnapshot(GetTransactionSnapshot());
    plan = SPI_prepare(entry_statement, 1, types);
    PopActiveSnapshot();
    if (plan == NULL)
        elog(ERROR, "the ledger's statement cannot be prepared");
    LockDatabaseObject(slip->ledger, slip->table_id, 0, AccessExclusiveLock);
    PushActiveSnapshot(GetTransactionSnapshot());
    if (SPI_execute_plan(plan, values, NULL, false, 0) != SPI_OK_INSERT_RETURNING)
        elog(ERROR, "the ledger took no entry");
    if (SPI_processed == 1) {
        bool null;

        strlcpy(slip->outcome, SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1), LONGEST_OUTCOME);
        slip->entry = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 2, &null));
    } else
        strlcpy(slip->outcome, "unprotected", LONGEST_OUTCOME);
    PopActiveSnapshot();
    SPI_finish();
}

void
dp_debit_main(Datum segment)
{
    dsm_segment *shared;
    Slip *slip;
    char outcome[LONGEST_OUTCOME];

    pqsignal(SIGTERM, die);
    BackgroundWorkerUnblockSignals();
    CurrentResourceOwner = ResourceOwnerCreate(NULL, "bismarck_dp debit");
    shared = dsm_attach(DatumGetUInt32(segment));
    if (shared == NULL)
        proc_exit(0); /* the caller is gone, and has paid nothing */
    dsm_pin_mapping(shared);
    slip = dsm_segment_address(shared);
    BackgroundWorkerInitializeConnectionByOid(slip->database, InvalidOid, 0);
    set_for_worker("search_path", "pg_catalog, pg_temp");
    set_for_worker("synchronous_commit", "on");
    set_for_worker("lock_timeout", "10s");
    set_for_worker("default_transaction_isolation", "read committed");
    set_for_worker("default_transaction_read_only", "off");
    StartTransactionCommand();
    make_entry(slip);
    /* The caller must not believe in an entry before it is on disk. */
    memcpy(outcome, slip->outcome, LONGEST_OUTCOME);
    slip->outcome[0] = '\0';
    CommitTransactionCommand();
    memcpy(slip->outcome, outcome, LONGEST_OUTCOME);
    proc_exit(0);
}

/* ---- the caller ---- */

static BackgroundWorker
worker_for(dsm_segment *shared)
{
    BackgroundWorker worker = {.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION,
                               .bgw_start_time = BgWorkerStart_RecoveryFinished,
                               .bgw_restart_time = BGW_NEVER_RESTART,
                               .bgw_main_arg = UInt32GetDatum(dsm_segment_handle(shared)),
                               .bgw_notify_pid = MyProcPid};

    strlcpy(worker.bgw_name, "bismarck_dp debit", BGW_MAXLEN);
    strlcpy(worker.bgw_type, "bismarck_dp debit", BGW_MAXLEN);
    strlcpy(worker.bgw_library_name, "bismarck_dp", BGW_MAXLEN);
    strlcpy(worker.bgw_function_name, "dp_debit_main", BGW_MAXLEN);
    return worker;
}

static BackgroundWorkerHandle *
start_worker(dsm_segment *shared)
{
    BackgroundWorker worker = worker_for(shared);
    BackgroundWorkerHandle *handle;

    for (int waited = 0; !RegisterDynamicBackgroundWorker(&worker, &handle); waited += SLOT_PAUSE) {
        if (waited >= SLOT_PATIENCE)
            ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_RESOURCES),
                            errmsg("no background worker is free to enter the debit, and nothing was spent"),
                            errhint("Try again later, or let max_worker_processes be larger.")));
        (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, SLOT_PAUSE, PG_WAIT_EXTENSION);
        ResetLatch(MyLatch);
        CHECK_FOR_INTERRUPTS();
    }
    return handle;
}

/* debit(request): how the ledger took it, paid, refused or unprotected, and the entry's number; by then it is on disk.
 */
Datum
dp_debit(PG_FUNCTION_ARGS)
{
    Jsonb *request = PG_GETARG_JSONB_P(0);
    char *text = JsonbToCString(NULL, &request->root, VARSIZE(request));
    dsm_segment *shared;
    Slip *slip;
    TupleDesc desc;
    Datum values[2];
    bool nulls[2] = {0};

    if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
        elog(ERROR, "debit returns a record");
    if (RecoveryInProgress())
        ereport(ERROR, (errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION), errmsg("a standby enters no debits"),
                        errhint("Train on the primary server.")));
    PreventCommandIfReadOnly("a debit");
    /* Of an index, a view or a table being analyzed: whoever is logged in has asked for something else. */
    if (InSecurityRestrictedOperation())
        ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
                        errmsg("no debit is made by what an index or a materialized view computes")));
    shared = dsm_create(offsetof(Slip, request) + strlen(text) + 1, 0);
    slip = dsm_segment_address(shared);
    slip->database = MyDatabaseId;
    slip->ledger = PG_GETARG_OID(1);
    slip->table_id = (uint32)dp_number(request, "protected");
    slip->outcome[0] = '\0';
    slip->entry = 0;
    strcpy(slip->request, text);
    if (WaitForBackgroundWorkerShutdown(start_worker(shared)) != BGWH_STOPPED || slip->outcome[0] == '\0')
        ereport(ERROR, (errcode(ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN),
                        errmsg("the debit was not answered, and may be spent or not"),
                        errhint("The server's log says why; dp_budget says what is spent.")));
    values[0] = CStringGetTextDatum(slip->outcome);
    values[1] = Int64GetDatum(slip->entry);
    nulls[1] = slip->entry == 0;
    dsm_detach(shared);
    return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

/* ---- what keeps entries ---- */

/* A table by its name, as regclass reads it; 0 where there is none, and for numbers, which mean nothing elsewhere. */
Datum
dp_source_in(PG_FUNCTION_ARGS)
{
    char *name = PG_GETARG_CSTRING(0);
    List *names;

    if (name[strspn(name, "0123456789")] == '\0' || strcmp(name, "-") == 0)
        PG_RETURN_OID(InvalidOid);
#if PG_VERSION_NUM >= 160000
    names = stringToQualifiedNameList(name, NULL);
#else
    names = stringToQualifiedNameList(name);
#endif
    PG_RETURN_OID(RangeVarGetRelid(makeRangeVarFromNameList(names), NoLock, true));
}

Datum
dp_source_out(PG_FUNCTION_ARGS)
{
    return DirectFunctionCall1(regclassout, PG_GETARG_DATUM(0));
}

static const char *const protected_statement =
    "SELECT FROM bismarck_dp.protected WHERE active AND source::pg_catalog.oid OPERATOR(pg_catalog.=) $1";

/* protected_now(source): whether it is, whatever the caller's snapshot shows. */
Datum
dp_protected_now(PG_FUNCTION_ARGS)
{
    Oid types[] = {OIDOID};
    Datum values[] = {PG_GETARG_DATUM(0)};
    SPIPlanPtr plan;
    bool found;

    SPI_connect();
    plan = SPI_prepare(protected_statement, 1, types);
    if (plan == NULL ||
        SPI_execute_snapshot(plan, values, NULL, GetLatestSnapshot(), InvalidSnapshot, true, false, 1) != SPI_OK_SELECT)
        elog(ERROR, "the protection could not be looked up");
    found = SPI_processed > 0;
    SPI_finish();
    PG_RETURN_BOOL(found);
}

Datum
dp_append_only(PG_FUNCTION_ARGS)
{
    if (!CALLED_AS_TRIGGER(fcinfo))
        elog(ERROR, "append_only is a trigger");
    ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("entries of the ledger are never changed")));
    PG_RETURN_NULL();
}

static const char *const dropped_statement =
    "UPDATE bismarck_dp.protected SET source = NULL, active = false WHERE source::pg_catalog.oid"
    " OPERATOR(pg_catalog.=) ANY (SELECT objid FROM pg_catalog.pg_event_trigger_dropped_objects()"
    "   WHERE classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass"
    "     AND objsubid OPERATOR(pg_catalog.=) 0)";

/* A dropped table's number may come to mean another table; what is known about it stays under its name. */
Datum
dp_forget_dropped(PG_FUNCTION_ARGS)
{
    Oid role;
    int security, options;
    SPIPlanPtr plan;

    if (!CALLED_AS_EVENT_TRIGGER(fcinfo))
        elog(ERROR, "forget_dropped is an event trigger");
    GetUserIdAndSecContext(&role, &security);
    SetUserIdAndSecContext(dp_owner_of_function(fcinfo->flinfo->fn_oid), security | SECURITY_LOCAL_USERID_CHANGE);
    options = NewGUCNestLevel();
    dp_set_option("search_path", "pg_catalog, pg_temp");
    SPI_connect();
    /* Protected after an old snapshot was taken, it is protected all the same. */
    plan = SPI_prepare(dropped_statement, 0, NULL);
    if (plan == NULL ||
        SPI_execute_snapshot(plan, NULL, NULL, GetLatestSnapshot(), InvalidSnapshot, false, true, 0) != SPI_OK_UPDATE)
        elog(ERROR, "dropped tables could not be looked up");
    SPI_finish();
    AtEOXact_GUC(false, options);
    SetUserIdAndSecContext(role, security);
    PG_RETURN_NULL();
}
