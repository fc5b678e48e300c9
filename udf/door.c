/*
 * door.c: the one door from the caller's rights to the extension's.
 *
 * We want dp_train to write packed copies and models that its caller cannot touch, and yet to read the source with no
 * rights but the caller's. So call(verb, request) remembers who calls, turns into the extension's owner with a pinned
 * search_path, and runs the controller; reading the source (read.c) turns back into the caller, search_path included.
 * SECURITY DEFINER alone would not do: it forgets who called. The controller answers with JSON; a refusal comes back
 * under the key "error" and is raised here, without a Python traceback, which also undoes everything the call did.
 */
#include "bismarck_dp.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "executor/instrument.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/syscache.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(dp_call);
PG_FUNCTION_INFO_V1(dp_caller);
PG_FUNCTION_INFO_V1(dp_admit);

void _PG_init(void);

/* Where the controller's Python package lies; set by a superuser, by default beside the server's modules. */
static char *python_path = NULL;

/* The calls under way, innermost first: a view's function may call dp_train while dp_train reads the view. */
static DpCaller *innermost = NULL;

void
_PG_init(void)
{
    char *beside = psprintf("%s/bismarck_dp_python", pkglib_path);

    DefineCustomStringVariable("bismarck_dp.python_path", "Directory of the Python package bismarck_dp.",
                               "Put in front of PL/Python's own path.", &python_path, beside, PGC_SUSET, 0, NULL, NULL,
                               NULL);
    pfree(beside);
}

Oid
dp_caller_role(void)
{
    return innermost ? innermost->role : GetUserId();
}

const char *
dp_caller_search_path(void)
{
    return innermost ? innermost->search_path : NULL;
}

void
dp_set_option(const char *name, const char *value)
{
    (void)set_config_option(name, value, superuser() ? PGC_SUSET : PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
                            false);
}

/* caller(): whose rights count, by name; the same inside the door and outside. */
Datum
dp_caller(PG_FUNCTION_ARGS)
{
    PG_RETURN_OID(dp_caller_role());
}

bool
dp_caller_is_admitted(Oid relation)
{
    return innermost != NULL && OidIsValid(relation) && innermost->admitted == relation;
}

/*
 * admit(source): from here to the end of this call, that table is read with the extension's rights. The controller says
 * so of a protected table, once it knows who calls, and before the debit. A call within this call is not admitted.
 */
Datum
dp_admit(PG_FUNCTION_ARGS)
{
    if (innermost == NULL)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE), errmsg("nobody is at the door")));
    innermost->admitted = PG_GETARG_OID(0);
    PG_RETURN_VOID();
}

Oid
dp_owner_of_function(Oid function)
{
    HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
    Oid owner;

    if (!HeapTupleIsValid(tuple))
        elog(ERROR, "cache lookup failed for function %u", function);
    owner = ((Form_pg_proc)GETSTRUCT(tuple))->proowner;
    ReleaseSysCache(tuple);
    return owner;
}

static Datum
serve(Datum verb, Datum request)
{
    Oid types[] = {TEXTOID, JSONBOID};
    Oid function = LookupFuncName(list_make2(makeString("bismarck_dp"), makeString("serve")), 2, types, false);

    return OidFunctionCall2(function, verb, request);
}

static void
raise_refusal(Jsonb *answer)
{
    char *state, *hint;

    if (!dp_has(answer, "error"))
        return;
    state = dp_word(answer, "sqlstate");
    hint = dp_word(answer, "hint");
    ereport(ERROR, (errcode(MAKE_SQLSTATE(state[0], state[1], state[2], state[3], state[4])),
                    errmsg_internal("%s", dp_word(answer, "error")), hint[0] ? errhint("%s", hint) : 0));
}

/* What the controller does, and how often, is not for others to see: it may depend on secret coins, and on rows. Anyone
 * may read how often a function was called, and a table, an index or an array out of line looked up. What is on the
 * caller's own screen is no news to a superuser. */
static void
keep_steps_quiet(Oid caller)
{
    dp_set_option("track_functions", "none");
    dp_set_option("track_counts", "off");
    if (superuser_arg(caller))
        return;
    dp_set_option("debug_print_parse", "off");
    dp_set_option("debug_print_rewritten", "off");
    dp_set_option("debug_print_plan", "off");
    if (client_min_messages < NOTICE)
        dp_set_option("client_min_messages", "notice");
}

Datum
dp_call(PG_FUNCTION_ARGS)
{
    DpCaller caller = {.search_path = pstrdup(namespace_search_path), .outer = innermost};
    BufferUsage used = pgBufferUsage;
    int context, options;
    Datum answer;

    GetUserIdAndSecContext(&caller.role, &context);
    SetUserIdAndSecContext(dp_owner_of_function(fcinfo->flinfo->fn_oid), context | SECURITY_LOCAL_USERID_CHANGE);
    options = NewGUCNestLevel();
    dp_set_option("search_path", "pg_catalog, pg_temp");
    dp_set_option("extra_float_digits", "1"); /* numbers cross the door as text, with all their digits */
    /* Where rows lie is the database's to say. */
    dp_set_option("default_tablespace", "");
    dp_set_option("temp_tablespaces", "");
    keep_steps_quiet(caller.role);
    innermost = &caller;
    PG_TRY();
    {
        answer = serve(PG_GETARG_DATUM(0), PG_GETARG_DATUM(1));
    }
    PG_CATCH();
    {
        innermost = caller.outer;
        pgBufferUsage = used;
        PG_RE_THROW();
    }
    PG_END_TRY();
    innermost = caller.outer;
    pgBufferUsage = used; /* EXPLAIN (BUFFERS) would count lookups, too */
    AtEOXact_GUC(false, options);
    SetUserIdAndSecContext(caller.role, context);
    raise_refusal(DatumGetJsonbP(answer));
    PG_RETURN_DATUM(answer);
}
