/* nearest.c - edit distance with insertions, deletions, replacements and swaps of neighbours (Damerau 1964; restricted
 * to one edit of each part). */
#include "nearest.h"

#include <string.h>

static int distance(const char *a, const char *b)
{
    int rows[3][TE_LONGEST_NAME + 1];
    int n = (int)strlen(a), m = (int)strlen(b);
    for (int j = 0; j <= m; j++) rows[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *row = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) best = above[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && above2[j - 2] + 1 < best)
                best = above2[j - 2] + 1;
            row[j] = best;
        }
    }
    return rows[n % 3][m];
}

te_nearest te_nearest_to(const char *wanted, size_t length)
{
    te_nearest nearest = {.least = 0};
    if (length > TE_LONGEST_NAME) return nearest;
    memcpy(nearest.wanted, wanted, length);
    int n = (int)length, limit = 1 + n / 3; /* some letter must stay */
    nearest.least = (limit < n ? limit : n - 1) + 1;
    return nearest;
}

bool te_nearest_consider(te_nearest *nearest, const char *name)
{
    size_t wanted = strlen(nearest->wanted), length = strlen(name);
    if (length > TE_LONGEST_NAME || nearest->least == 0) return false;
    bool beginning = wanted > 2 && strncmp(nearest->wanted, name, wanted) == 0;
    int  edits = beginning ? 1 : distance(nearest->wanted, name);
    if (edits >= nearest->least) return false;
    nearest->least = edits;
    memcpy(nearest->name, name, length + 1);
    return true;
}
