/* nearest.c - edit distance with insertions, deletions, replacements and swaps of neighbours (Damerau 1964; restricted
 * to one edit of each part). Capital letters for small ones count a little. */
#include "nearest.h"

#include <ctype.h>
#include <string.h>

enum { CASE = 1, EDIT = 4 };

static int replacing(char a, char b)
{
    return a == b ? 0 : tolower((unsigned char)a) == tolower((unsigned char)b) ? CASE : EDIT;
}

static int distance(const char *a, const char *b)
{
    int rows[3][TE_LONGEST_NAME + 1];
    int n = (int)strlen(a), m = (int)strlen(b);
    for (int j = 0; j <= m; j++) rows[0][j] = EDIT * j;
    for (int i = 1; i <= n; i++) {
        int *row = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
        row[0] = EDIT * i;
        for (int j = 1; j <= m; j++) {
            int best = above[j - 1] + replacing(a[i - 1], b[j - 1]);
            if (above[j] + EDIT < best) best = above[j] + EDIT;
            if (row[j - 1] + EDIT < best) best = row[j - 1] + EDIT;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && above2[j - 2] + EDIT < best)
                best = above2[j - 2] + EDIT;
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
    int n = (int)length, limit = n > 3 ? 1 + n / 3 : 1; /* some letter must stay */
    nearest.least = EDIT * (limit < n ? limit : n - 1) + 1;
    return nearest;
}

bool te_nearest_consider(te_nearest *nearest, const char *name)
{
    size_t wanted = strlen(nearest->wanted), length = strnlen(name, TE_LONGEST_NAME + 1);
    if (length > TE_LONGEST_NAME || nearest->least == 0) return false;
    bool beginning = wanted > 2 && strncmp(nearest->wanted, name, wanted) == 0;
    int  far = beginning ? EDIT : distance(nearest->wanted, name);
    if (far >= nearest->least) return false;
    nearest->least = far;
    memcpy(nearest->name, name, length + 1);
    return true;
}
