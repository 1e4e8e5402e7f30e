/* tokenizer.c - from a text to pieces. */
#include "tokenizer.h"

#include "nfc.h"
#include "regex.h"
#include "utf8.h"

/* The added tokens of one kind, longest first. */
typedef struct added_list {
    te_added_token *tokens; /* with bytes of their own */
    size_t          n, capacity;
    bool            begins[256]; /* some token begins with this byte */
} added_list;

struct te_tokenizer {
    const te_mem *mem;
    te_bpe       *bpe;
    bool          blanks, space, composes;
    te_nfc        nfc;
    added_list    raw, normalized;
    te_regex     *steps[TE_TOKENIZER_STEPS]; /* NULL: a space in front */
    bool          at_start[TE_TOKENIZER_STEPS];
    size_t        n_steps;
    int           spaces; /* steps that put one in front */
    unsigned char *spaced; /* a piece behind its space */
    size_t        spaced_capacity;
    unsigned char *blanked; /* a run with its spaces */
    size_t        blanked_capacity;
};

/* One call of te_tokenizer_encode. */
typedef struct job {
    te_tokenizer        *t;
    const unsigned char *text;
    const unsigned char *joined; /* where a run follows a byte that is no UTF-8: it gets no space; or NULL */
    const unsigned char *start;  /* the run that the text begins with; or NULL */
    te_bpe_ids          *ids;
    te_io_error         *error;
} job;

static te_status out_of_memory(te_io_error *error)
{
    return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for a tokenizer");
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static te_status take_step(job *j, size_t k, const unsigned char *piece, size_t size);

static te_status put_space(job *j, size_t k, const unsigned char *piece, size_t size)
{
    te_tokenizer *t = j->t;
    bool          spaced = piece[0] == ' ' || piece == j->joined || (t->at_start[k] && piece != j->start);
    if (spaced) return take_step(j, k + 1, piece, size);
    if (!te_mem_grow(t->mem, &t->spaced, &t->spaced_capacity, size + 1, 1)) return out_of_memory(j->error);
    t->spaced[0] = ' ';
    memcpy(t->spaced + 1, piece, size);
    return take_step(j, k + 1, t->spaced, size + 1);
}

static size_t point_size(const unsigned char *text) /* of valid UTF-8 */
{
    return text[0] < 0x80 ? 1 : text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : 4;
}

/* An empty match cuts, except behind the match before it. */
static te_status split(job *j, size_t k, const unsigned char *piece, size_t size)
{
    te_regex *regex = j->t->steps[k];
    size_t    done = 0, last = SIZE_MAX, begin, end;
    te_status status = TE_OK;
    for (size_t from = 0; from <= size && status == TE_OK;) {
        status = te_regex_find(regex, piece, size, from, &begin, &end, j->error);
        if (status != TE_OK || begin == SIZE_MAX) break;
        if (begin == end && end == last) {
            from += from < size ? point_size(piece + from) : 1;
            continue;
        }
        if (begin > done) status = take_step(j, k + 1, piece + done, begin - done);
        if (end > begin && status == TE_OK) status = take_step(j, k + 1, piece + begin, end - begin);
        done = from = last = end;
    }
    if (status == TE_OK && done < size) status = take_step(j, k + 1, piece + done, size - done);
    return status;
}

static te_status take_step(job *j, size_t k, const unsigned char *piece, size_t size)
{
    te_tokenizer *t = j->t;
    if (k == t->n_steps) return te_bpe_encode(t->bpe, piece, size, j->ids, j->error);
    return t->steps[k] ? split(j, k, piece, size) : put_space(j, k, piece, size);
}

/* --- added tokens ------------------------------------------------------------------------------------------------- */

/* The first added token at `from` or later; NULL: none. *place is where it stands. */
static const te_added_token *next_added(const added_list *list, const unsigned char *text, size_t size, size_t from,
                                        size_t *place)
{
    for (size_t at = list->n ? from : size; at < size; at++) {
        if (!list->begins[text[at]]) continue;
        for (size_t i = 0; i < list->n; i++) {
            const te_added_token *token = &list->tokens[i];
            if (token->size > size - at || memcmp(token->bytes, text + at, token->size) != 0) continue;
            *place = at;
            return token;
        }
    }
    return NULL;
}

/* Calls `rest` for what lies between the added tokens of a list. */
static te_status take_out(job *j, const added_list *list, const unsigned char *text, size_t size,
                          te_status (*rest)(job *j, const unsigned char *text, size_t size))
{
    size_t    from = 0, place = 0;
    te_status status = TE_OK;
    for (const te_added_token *token; (token = next_added(list, text, size, from, &place));) {
        if (place > from) status = rest(j, text + from, place - from);
        if (status != TE_OK) return status;
        if (!te_bpe_ids_push(j->ids, token->id)) return out_of_memory(j->error);
        from = place + token->size;
    }
    return from < size ? rest(j, text + from, size - from) : TE_OK;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

static te_status first_step(job *j, const unsigned char *text, size_t size) { return take_step(j, 0, text, size); }

static const char BLANK[] = "\xE2\x96\x81"; /* U+2581 */
enum { BLANK_SIZE = sizeof BLANK - 1 };

/* Spaces where there are blanks, and one in front. */
static te_status put_spaces(te_tokenizer *t, const unsigned char **run, size_t *size, bool in_front, te_io_error *error)
{
    const unsigned char *from = *run, *end = from + *size;
    if (!te_mem_grow(t->mem, &t->blanked, &t->blanked_capacity, *size + 1, 1)) return out_of_memory(error);
    unsigned char *to = t->blanked;
    if (in_front) *to++ = ' ';
    while (from < end) {
        bool blank = t->blanks && (size_t)(end - from) >= BLANK_SIZE && memcmp(from, BLANK, BLANK_SIZE) == 0;
        *to++ = blank ? ' ' : *from;
        from += blank ? BLANK_SIZE : 1;
    }
    *run = t->blanked;
    *size = (size_t)(to - t->blanked);
    return TE_OK;
}

/* *run and *size become those of a normalized copy, which stands until the next call. */
static te_status normalize(te_tokenizer *t, const unsigned char **run, size_t *size, bool joined, te_io_error *error)
{
    te_status status = TE_OK;
    if (t->blanks || t->space) status = put_spaces(t, run, size, t->space && !joined, error);
    if (status == TE_OK && t->composes) status = te_nfc_normalize(&t->nfc, run, size, error);
    return status;
}

static te_status encode_run(job *j, const unsigned char *run, size_t size, bool joined)
{
    bool      first = run == j->text;
    te_status status = normalize(j->t, &run, &size, joined, j->error);
    if (status != TE_OK) return status;
    j->joined = joined ? run : NULL;
    j->start = first ? run : NULL;
    return take_out(j, &j->t->normalized, run, size, first_step);
}

static te_status encode_runs(job *j, const unsigned char *text, size_t size)
{
    te_status status = TE_OK;
    bool      joined = false;
    for (size_t at = 0; at < size && status == TE_OK;) {
        uint32_t point;
        size_t   begin = at, n = 0;
        while (at < size && (n = text[at] < 0x80 ? 1 : te_utf8_decode(text + at, size - at, &point))) at += n;
        if (at > begin) status = encode_run(j, text + begin, at - begin, joined);
        joined = true;
        if (at < size && status == TE_OK) status = te_bpe_encode(j->t->bpe, text + at++, 1, j->ids, j->error);
    }
    return status;
}

te_status te_tokenizer_encode(te_tokenizer *t, const char *text, size_t size, te_bpe_ids *ids, te_io_error *error)
{
    job j = {.t = t, .text = (const unsigned char *)text, .ids = ids, .error = error};
    return take_out(&j, &t->raw, (const unsigned char *)text, size, encode_runs);
}

/* --- making it ---------------------------------------------------------------------------------------------------- */

static te_status add(te_tokenizer *t, const te_added_token *token, te_io_error *error)
{
    added_list          *list = token->normalized ? &t->normalized : &t->raw;
    const unsigned char *bytes = (const unsigned char *)token->bytes;
    size_t               size = token->size;
    if (token->normalized) {
        te_status status = normalize(t, &bytes, &size, false, error);
        if (status != TE_OK) return status;
    }
    if (!te_mem_grow(t->mem, &list->tokens, &list->capacity, list->n + 1, sizeof *list->tokens))
        return out_of_memory(error);
    char *copy = te_mem_alloc(t->mem, size);
    if (!copy) return out_of_memory(error);
    memcpy(copy, bytes, size);
    size_t i = list->n++;
    for (; i > 0 && list->tokens[i - 1].size < size; i--) list->tokens[i] = list->tokens[i - 1];
    list->tokens[i] = (te_added_token){copy, size, token->id, token->normalized};
    list->begins[bytes[0]] = true;
    return TE_OK;
}

static te_status fill(te_tokenizer *t, const te_tokenizer_options *o, te_io_error *error)
{
    if (o->n_steps > TE_TOKENIZER_STEPS)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "%zu steps of cutting, at most %d", o->n_steps,
                          TE_TOKENIZER_STEPS);
    te_status status = te_bpe_new(&t->bpe, t->mem, &o->bpe, error);
    for (size_t i = 0; i < o->n_added && status == TE_OK; i++) status = add(t, &o->added[i], error);
    for (size_t i = 0; i < o->n_steps && status == TE_OK; i++, t->n_steps++) {
        const te_tokenizer_step *s = &o->steps[i];
        t->at_start[i] = s->at_start;
        if (!s->pattern && t->spaces++)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "two steps put a space in front"); /* in one buffer */
        if (s->pattern) status = te_regex_new(&t->steps[i], t->mem, s->pattern, s->size, s->literal, error);
    }
    return status;
}

te_status te_tokenizer_new(te_tokenizer **out, const te_mem *mem, const te_tokenizer_options *options,
                           te_io_error *error)
{
    *out = NULL;
    te_tokenizer *t = te_mem_zalloc(mem, sizeof *t);
    if (!t) return out_of_memory(error);
    t->mem = t->nfc.mem = mem;
    t->blanks = options->blanks;
    t->space = options->space;
    t->composes = options->nfc;
    te_status status = fill(t, options, error);
    if (status == TE_OK)
        *out = t;
    else
        te_tokenizer_free(t);
    return status;
}

static void free_list(const te_mem *mem, added_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        te_mem_free(mem, (void *)(uintptr_t)list->tokens[i].bytes, list->tokens[i].size);
    te_mem_free(mem, list->tokens, list->capacity * sizeof *list->tokens);
}

void te_tokenizer_free(te_tokenizer *t)
{
    if (!t) return;
    te_bpe_free(t->bpe);
    free_list(t->mem, &t->raw);
    free_list(t->mem, &t->normalized);
    for (size_t i = 0; i < t->n_steps; i++) te_regex_free(t->steps[i]);
    te_mem_free(t->mem, t->spaced, t->spaced_capacity);
    te_mem_free(t->mem, t->blanked, t->blanked_capacity);
    te_nfc_free(&t->nfc);
    te_mem_free(t->mem, t, sizeof *t);
}

/* --- looking up --------------------------------------------------------------------------------------------------- */

const te_bpe *te_tokenizer_bpe(const te_tokenizer *t) { return t->bpe; }

int32_t te_tokenizer_find(const te_tokenizer *t, const char *bytes, size_t size)
{
    const added_list *lists[] = {&t->raw, &t->normalized};
    for (int k = 0; k < 2; k++) {
        size_t                place;
        const te_added_token *token = next_added(lists[k], (const unsigned char *)bytes, size, 0, &place);
        if (token && token->size == size) return token->id;
    }
    return te_bpe_find(t->bpe, bytes, size);
}
