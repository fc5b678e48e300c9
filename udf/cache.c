/*
 * cache.c: the models that a session used last, ready to be used again.
 *
 * A model is read by SQL once. It is kept with the place of its row in the table of models and the transaction that
 * made that row, and is as good as a fresh one while the snapshot still sees the very same row: one look at one page
 * for each statement. So forgotten, replaced, undone and not yet visible models need no bookkeeping, whoever changes
 * them, and a role's right to a model is asked for as often. What rewrites the table, or drops it, is heard of, and
 * ends every use.
 *
 * Models are few: 64, and no more memory than MOST_BYTES once the transaction is over. They are freed only where
 * another is looked for, never under a call that computes.
 */
#include "model.h"

#include "access/relation.h"
#include "access/sysattr.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#define MOST_MODELS 64
#define MOST_BYTES ((Size)64 * 1024 * 1024)

/* What a snapshot sees. Of two that begin and end at the same transactions, the later has fewer of them running. */
typedef struct Sight {
    uint64 era;
    TransactionId xmin, xmax;
    uint32 xcnt;
    int32 subxcnt;
    CommandId command;
    Oid role;
} Sight;

typedef struct Kept {
    DpModel *model; /* NULL: free */
    MemoryContext context;
    int length;    /* of the name */
    bool is_stale; /* its place says nothing any more */
    uint64 used;
    Sight sight; /* it was last found good with */
} Kept;

static Kept kept[MOST_MODELS];
static Kept *latest = kept;
static uint64 era = 0; /* ends with each transaction, and with what is undone */
static uint64 uses = 0;
static bool is_listening = false;

static Size
bytes_of(const Kept *k)
{
    return k->model == NULL ? 0 : MemoryContextMemAllocated(k->context, true);
}

static void
drop(Kept *k)
{
    MemoryContext context = k->context;

    *k = (Kept){0};
    if (context != NULL)
        MemoryContextDelete(context);
}

/* A free place, or that of the model that was not used for longest. */
static Kept *
oldest(void)
{
    Kept *found = kept;

    for (int i = 1; i < MOST_MODELS; i++)
        if (kept[i].used < found->used)
            found = &kept[i];
    return found;
}

static Kept *
oldest_in_use(void)
{
    Kept *found = NULL;

    for (int i = 0; i < MOST_MODELS; i++)
        if (kept[i].model != NULL && (found == NULL || kept[i].used < found->used))
            found = &kept[i];
    return found;
}

static void
keep_within_bounds(void)
{
    Size total = 0;

    for (int i = 0; i < MOST_MODELS; i++)
        total += bytes_of(&kept[i]);
    while (total > MOST_BYTES) {
        Kept *k = oldest_in_use();

        total -= bytes_of(k);
        drop(k);
    }
}

/* ---- what is heard ---- */

static void
on_relation_change(Datum arg, Oid relation)
{
    for (int i = 0; i < MOST_MODELS; i++)
        if (kept[i].model != NULL && (relation == InvalidOid || relation == kept[i].model->relation))
            kept[i].is_stale = true;
}

/* Who is a member of what. */
static void
on_role_change(Datum arg, int cache, uint32 hash)
{
    era++;
}

static void
on_transaction_end(XactEvent event, void *arg)
{
    if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE &&
        event != XACT_EVENT_PARALLEL_COMMIT && event != XACT_EVENT_PARALLEL_ABORT)
        return;
    era++;
    keep_within_bounds();
}

static void
on_subtransaction_end(SubXactEvent event, SubTransactionId self, SubTransactionId parent, void *arg)
{
    if (event == SUBXACT_EVENT_ABORT_SUB)
        era++;
}

static void
listen(void)
{
    if (is_listening)
        return;
    CacheRegisterRelcacheCallback(on_relation_change, (Datum)0);
    CacheRegisterSyscacheCallback(AUTHMEMROLEMEM, on_role_change, (Datum)0);
    RegisterXactCallback(on_transaction_end, NULL);
    RegisterSubXactCallback(on_subtransaction_end, NULL);
    is_listening = true;
}

/* ---- is it still good? ---- */

static Sight
sight_now(void)
{
    Snapshot snapshot = GetActiveSnapshot();

    return (Sight){era,        snapshot->xmin, snapshot->xmax, snapshot->xcnt, snapshot->subxcnt, snapshot->curcid,
                   GetUserId()};
}

static inline bool
is_sight_of_now(const Sight *s)
{
    Snapshot snapshot = GetActiveSnapshot();

    return s->era == era && s->xmax == snapshot->xmax && s->xmin == snapshot->xmin && s->xcnt == snapshot->xcnt &&
           s->subxcnt == snapshot->subxcnt && s->command == snapshot->curcid && s->role == GetUserId();
}

/* Whether the snapshot sees the row at that place, made by that transaction. Places are used again, and pages go. */
static bool
is_same_row(Relation relation, DpModel *m)
{
    TupleTableSlot *slot;
    bool isnull, same;

    if (ItemPointerGetBlockNumber(&m->place) >= RelationGetNumberOfBlocks(relation))
        return false;
    slot = table_slot_create(relation, NULL);
    same = table_tuple_fetch_row_version(relation, &m->place, GetActiveSnapshot(), slot) &&
           DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull)) == m->maker;
    ExecDropSingleTupleTableSlot(slot);
    return same;
}

static bool
is_good(Kept *k)
{
    Relation relation;
    bool good;

    AcceptInvalidationMessages(); /* a lock that the transaction has already brings no news */
    if (k->is_stale || !is_member_of_role(GetUserId(), k->model->owner))
        return false;
    relation = try_relation_open(k->model->relation, AccessShareLock);
    if (relation == NULL)
        return false;
    good = !k->is_stale && is_same_row(relation, k->model);
    relation_close(relation, NoLock);
    return good;
}

/* ---- looking for one ---- */

static inline bool
is_named(const Kept *k, const char *name, int length)
{
    return k->model != NULL && k->length == length && memcmp(k->model->name, name, length) == 0;
}

static Kept *
find(const char *name, int length)
{
    for (int i = 0; i < MOST_MODELS; i++)
        if (is_named(&kept[i], name, length))
            return &kept[i];
    return NULL;
}

/* Its memory is of the call until all went well. */
static Kept *
read_model(Kept *place, const char *name, int length, Oid function)
{
    MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "bismarck_dp model", ALLOCSET_SMALL_SIZES);
    Sight sight = sight_now();
    DpModel *m = dp_model_named(pnstrdup(name, length), GetUserId(), function, context);

    drop(place);
    MemoryContextSetParent(context, CacheMemoryContext);
    *place = (Kept){.model = m, .context = context, .length = length, .sight = sight};
    return place;
}

static Kept *
search(const char *name, int length, Oid function)
{
    Kept *k = find(name, length);

    listen();
    if (k == NULL)
        k = read_model(oldest(), name, length, function);
    else if (!is_sight_of_now(&k->sight) || k->is_stale) {
        if (is_good(k))
            k->sight = sight_now();
        else
            k = read_model(k, name, length, function);
    }
    k->used = ++uses;
    return latest = k;
}

DpModel *
dp_model_kept(const text *name, Oid function)
{
    int length = (int)VARSIZE_ANY_EXHDR(name);

    if (!ActiveSnapshotSet()) /* a domain's CHECK, say, right after COMMIT in a procedure */
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
                        errmsg("a model cannot be looked up where no query runs"),
                        errhint("Call this function in a statement of its own.")));
    if (!is_named(latest, VARDATA_ANY(name), length) || latest->is_stale || !is_sight_of_now(&latest->sight))
        return search(VARDATA_ANY(name), length, function)->model;
    return latest->model;
}
